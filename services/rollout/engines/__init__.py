"""Inference engines behind one protocol; `registry` names them."""
