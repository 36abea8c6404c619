"""Next-word prediction on StackOverflow and on text in the same format."""
