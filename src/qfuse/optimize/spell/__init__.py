"""Write products in other forms as products of matrices."""
