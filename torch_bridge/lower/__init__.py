"""How this process executes a plan: messages, collectives and local steps."""
