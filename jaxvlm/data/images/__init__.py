"""Image files: decode, resize, preprocess, and cut into tiles or patches."""
