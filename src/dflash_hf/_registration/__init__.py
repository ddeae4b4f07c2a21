"""Registration of the classes with transformers' Auto classes, without importing transformers early."""
