"""What runs in float16, and what stays in float32."""
