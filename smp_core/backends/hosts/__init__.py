"""Hosts: how ranks come to exist."""
