"""What inductor's passes make of compiled steps: which collectives travel beside products."""
