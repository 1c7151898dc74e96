"""A plan as text, JSON, an HTML page, or a comparison of two plans."""
