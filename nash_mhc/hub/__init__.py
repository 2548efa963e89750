"""Import and export of Hugging Face models and PEFT adapters."""
