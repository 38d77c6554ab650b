"""What a training program uses: `attach`, and the `Run` that it returns."""
