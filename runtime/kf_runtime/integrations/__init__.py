"""Patches for other packages; each imports what it patches inside its functions."""
