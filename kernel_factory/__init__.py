"""Offline kernel factory: compile, prove, admit and package cubins. Nothing here ships in the wheel."""
