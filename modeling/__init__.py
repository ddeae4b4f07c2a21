"""The files next to a drafter's weights on the Hub; they need only torch and transformers."""
