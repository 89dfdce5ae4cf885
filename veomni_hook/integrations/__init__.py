"""Parts for other libraries. Each module imports the library that it is for."""
