"""The files that lie beside a drafter's weights on the Hub; they run alone on torch and transformers."""
