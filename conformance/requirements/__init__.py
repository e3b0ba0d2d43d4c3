"""The requirements: what one is (`registry`), each area in a file, and all of them (`catalogue`)."""
