"""One folder per family; every folder exports ``FAMILY``. Families never import each other."""
