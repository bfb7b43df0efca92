"""What leaves the process for other systems beside the metrics: traces, and the rows of the audit trail."""
