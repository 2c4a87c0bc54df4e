"""Many runs together: comparisons, and what they say."""
