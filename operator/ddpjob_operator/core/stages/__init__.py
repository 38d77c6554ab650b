"""One module for each stage of a job, from its prerequisites to its end: what to do, and which transition follows."""
