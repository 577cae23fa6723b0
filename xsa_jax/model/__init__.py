"""The decoder: layers, attention, and the transformer that scans them."""
