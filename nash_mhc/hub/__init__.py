"""Models as folders that Hugging Face's transformers reads."""
