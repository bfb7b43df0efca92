"""What is measured of a system, one protocol a file: each makes records of samples, and a summary of records alone."""
