"""Running a model: its states and gradients in one pass, its upper layers alone, completions; on what its device has."""
