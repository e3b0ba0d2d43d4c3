"""The properties, one file for each area. Each points to the requirement that it tests."""
