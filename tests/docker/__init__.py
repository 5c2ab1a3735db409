"""Builds the images and runs docker-compose.yml to its first adapter: begin with `__main__.py`."""
