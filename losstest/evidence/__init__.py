"""What the processes of a run write down, and how it is read back."""
