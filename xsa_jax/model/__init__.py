"""The decoder: layers, attention, and the stack that scans them."""
