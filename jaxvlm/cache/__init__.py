"""The visual-token cache: tokens kept in the train state, in host memory and on disk."""
