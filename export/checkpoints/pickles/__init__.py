"""Pickles read as data: nothing named in them is imported or called."""
