"""Text that a target writes itself: prompts, answers, whole data sets."""
