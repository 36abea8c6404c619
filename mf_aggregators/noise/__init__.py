"""How the rows of C^-1 Z follow from one another and from random bits, in NumPy."""
