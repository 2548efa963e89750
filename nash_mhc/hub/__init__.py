"""Hugging Face models: their folders read onto a mesh, and ours written for them."""
