/* The one routine of BLAS that MLX calls in float32, by its plain name (see Makefile). */

#define SGEMM(name)                                                                            \
    void name(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,           \
              const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc)

SGEMM(scipy_cblas_sgemm);

SGEMM(cblas_sgemm)
{
    scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
