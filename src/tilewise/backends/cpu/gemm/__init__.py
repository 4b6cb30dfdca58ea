"""Matrix products: blocked GEMM for prefill, GEMV for decode; fp32 vectors, AMX tiles, VNNI integers."""
