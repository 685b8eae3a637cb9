"""A trainer's checkpoint as an ordinary Hugging Face model directory. A folder of sluice or
verl comes in; safetensors files and a `config.json` go out.
"""
