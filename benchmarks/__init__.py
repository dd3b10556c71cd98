"""headrace beside the loaders that people would pick instead. See README.md in this folder."""
