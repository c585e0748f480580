"""`xshard explore`: a page on which one changes a letter of an expression and sees what changes."""
