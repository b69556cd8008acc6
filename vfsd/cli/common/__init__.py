"""What the commands share: base classes, output, interrupts, values and their completion."""
