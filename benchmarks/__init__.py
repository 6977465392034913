"""What is measured rather than tested. Not part of the package."""
