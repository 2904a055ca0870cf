// cuBLAS and cuBLASLt: matrix products that take their time and touch their operands, and compute nothing.
#include "null.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdlib>
#include <cstring>

using namespace null;

static size_t itemsize(cudaDataType t) {
    switch (t) {
        case CUDA_R_64F:
        case CUDA_C_32F:
            return 8;
        case CUDA_R_32F:
            return 4;
        case CUDA_R_16F:
        case CUDA_R_16BF:
            return 2;
        default:
            return 1;
    }
}

// A matrix as cuBLAS sees it: column by column, `ld` elements from one to the next.
struct Matrix {
    const void *start;
    cudaDataType type;
    int64_t rows, columns, ld, batch = 1, stride = 0;

    Range range(bool writes) const {
        int64_t last = (batch - 1) * stride + (columns - 1) * ld + rows;
        return {start, size_t(last) * itemsize(type), writes};
    }
    double bytes() const { return 1.0 * batch * rows * columns * itemsize(type); }
};

// out = alpha a b + beta c. `k`: what is summed over.
static cublasStatus_t product(Stream &stream, const Matrix &a, const Matrix &b, const Matrix *c,
                              const Matrix &out, int64_t k) {
    counts[PRODUCTS]++;
    double flops = 2.0 * out.batch * out.rows * out.columns * k;
    double bytes = a.bytes() + b.bytes() + out.bytes() + (c ? c->bytes() : 0);
    std::vector<Range> ranges = {a.range(false), b.range(false), out.range(true)};
    if (c && c->start != out.start) ranges.push_back(c->range(false));
    work(stream, COMPUTE, product_s(flops, bytes), ranges, "product");
    return CUBLAS_STATUS_SUCCESS;
}

// --- cuBLAS: a handle holds its stream ---

struct Handle {
    cudaStream_t stream;
    char rest[4096];
};

static cublasStatus_t gemm(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n,
                           int64_t k, const void *A, cudaDataType at, int64_t lda, int64_t sa, const void *B,
                           cudaDataType bt, int64_t ldb, int64_t sb, bool adds, void *C, cudaDataType ct,
                           int64_t ldc, int64_t sc, int64_t batch) {
    Lock lock(mutex);
    Matrix a{A, at, ta == CUBLAS_OP_N ? m : k, ta == CUBLAS_OP_N ? k : m, lda, batch, sa};
    Matrix b{B, bt, tb == CUBLAS_OP_N ? k : n, tb == CUBLAS_OP_N ? n : k, ldb, batch, sb};
    Matrix c{C, ct, m, n, ldc, batch, sc};
    return product(stream_of(((Handle *)h)->stream), a, b, adds ? &c : nullptr, c, k);
}

// beta lies on the host; all types that torch uses for it are zero where its first four bytes are, but for
// fp64
static bool nonzero(const void *beta, size_t bytes = 4) {
    static const char zero[8] = {};
    return memcmp(beta, zero, bytes) != 0;
}

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *h) {
    *h = (cublasHandle_t)calloc(1, sizeof(Handle));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
    free(h);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
    ((Handle *)h)->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t *m) {
    *m = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t *m) {
    *m = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *, const void *A, cudaDataType at, int lda, const void *B,
                            cudaDataType bt, int ldb, const void *beta, void *C, cudaDataType ct, int ldc,
                            cublasComputeType_t, cublasGemmAlgo_t) {
    return gemm(h, ta, tb, m, n, k, A, at, lda, 0, B, bt, ldb, 0, nonzero(beta), C, ct, ldc, 0, 1);
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                          int n, int k, const void *, const void *A, cudaDataType at, int lda,
                                          long long sa, const void *B, cudaDataType bt, int ldb, long long sb,
                                          const void *beta, void *C, cudaDataType ct, int ldc, long long sc,
                                          int batch, cublasComputeType_t, cublasGemmAlgo_t) {
    return gemm(h, ta, tb, m, n, k, A, at, lda, sa, B, bt, ldb, sb, nonzero(beta), C, ct, ldc, sc, batch);
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                              int k, const float *, const float *A, int lda, const float *B, int ldb,
                              const float *beta, float *C, int ldc) {
    return gemm(h, ta, tb, m, n, k, A, CUDA_R_32F, lda, 0, B, CUDA_R_32F, ldb, 0, nonzero(beta), C,
                CUDA_R_32F, ldc, 0, 1);
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                         int n, int k, const float *, const float *A, int lda, long long sa,
                                         const float *B, int ldb, long long sb, const float *beta, float *C,
                                         int ldc, long long sc, int batch) {
    return gemm(h, ta, tb, m, n, k, A, CUDA_R_32F, lda, sa, B, CUDA_R_32F, ldb, sb, nonzero(beta), C,
                CUDA_R_32F, ldc, sc, batch);
}
cublasStatus_t cublasDgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                              int k, const double *, const double *A, int lda, const double *B, int ldb,
                              const double *beta, double *C, int ldc) {
    return gemm(h, ta, tb, m, n, k, A, CUDA_R_64F, lda, 0, B, CUDA_R_64F, ldb, 0, nonzero(beta, 8), C,
                CUDA_R_64F, ldc, 0, 1);
}

// --- cuBLASLt: descriptors say how the operands lie ---

struct Descriptor {
    int32_t transposed[2];
};  // of a and b; lies in the caller's own storage of 32 words or more
struct Layout {
    int32_t type, batch;
    int64_t rows, columns, ld, stride;
};  // as Matrix; the opaque type has 64 bytes
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) { return cublasCreate_v2((cublasHandle_t *)h); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { return cublasDestroy_v2((cublasHandle_t)h); }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t, cudaDataType_t) {
    *d = (cublasLtMatmulDesc_t)calloc(1, sizeof(cublasLtMatmulDescOpaque_t));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    free(d);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
                                              const void *value, size_t) {
    Descriptor *mine = (Descriptor *)d;
    if (what == CUBLASLT_MATMUL_DESC_TRANSA) mine->transposed[0] = *(const int32_t *)value != CUBLAS_OP_N;
    if (what == CUBLASLT_MATMUL_DESC_TRANSB) mine->transposed[1] = *(const int32_t *)value != CUBLAS_OP_N;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType t, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    Layout *mine = (Layout *)calloc(1, sizeof(cublasLtMatrixLayoutOpaque_t));
    *mine = {t, 1, (int64_t)rows, (int64_t)columns, ld, 0};
    *l = (cublasLtMatrixLayout_t)mine;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    free(l);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t what, const void *value,
                                                size_t) {
    if (what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((Layout *)l)->batch = *(const int32_t *)value;
    if (what == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) ((Layout *)l)->stride = *(const int64_t *)value;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = (cublasLtMatmulPreference_t)calloc(1, sizeof(cublasLtMatmulPreferenceOpaque_t));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t, const void *,
                                                    size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t *found, int *n) {
    memset(found, 0, sizeof *found);  // one algorithm, which takes no workspace
    *n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

static Matrix matrix(const void *start, cublasLtMatrixLayout_t layout) {
    const Layout *l = (const Layout *)layout;
    return {start, (cudaDataType)l->type, l->rows, l->columns, l->ld, l->batch, l->stride};
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void *, const void *A,
                              cublasLtMatrixLayout_t al, const void *B, cublasLtMatrixLayout_t bl,
                              const void *beta, const void *C, cublasLtMatrixLayout_t cl, void *D,
                              cublasLtMatrixLayout_t dl, const cublasLtMatmulAlgo_t *, void *, size_t,
                              cudaStream_t s) {
    Lock lock(mutex);
    Matrix a = matrix(A, al), c = matrix(C, cl);
    int64_t k = ((Descriptor *)d)->transposed[0] ? a.rows : a.columns;
    return product(stream_of(s), a, matrix(B, bl), nonzero(beta) ? &c : nullptr, matrix(D, dl), k);
}

const char *cublasGetStatusString(cublasStatus_t s) {
    return s == CUBLAS_STATUS_SUCCESS ? "ok" : "an error of null cuBLAS";
}

}  // extern "C"
