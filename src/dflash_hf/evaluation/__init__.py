"""What a pair achieves: measures, texts, pictures, and the bench."""
