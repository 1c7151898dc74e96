"""Object stores and web servers: files at a URL, read and written within a deadline."""
