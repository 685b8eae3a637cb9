"""Stands in for vLLM, which SGLang asks for one function where it knows no accelerator."""
