"""Storage of half-precision variables in float32."""
