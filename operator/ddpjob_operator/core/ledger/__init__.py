"""What the status records of the training: progress, snapshots, goodput. Nothing here changes what the job does."""
