"""The pipeline: modules called over ranks, microbatch by microbatch."""
