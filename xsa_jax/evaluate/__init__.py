"""What a trained model does on held-out text: its loss by position and context, and what it writes."""
