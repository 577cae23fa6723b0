"""What attention does inside a trained model, and how runs differ."""
