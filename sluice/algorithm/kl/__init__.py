"""Divergence from the reference policy; torch only in `reward_penalty` and in what is given."""
