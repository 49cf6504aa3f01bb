"""The ops: one public torch function a file, with its generic path."""
