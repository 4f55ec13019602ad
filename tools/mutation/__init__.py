"""Mutation testing: which changes of the code would no test notice."""
