// CUDA C++ for conformance: what the DSL does not emit. Each kernel is extern "C" and small.
#include <cassert>
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

namespace cg = cooperative_groups;

extern "C" __global__ void integer_atomics(const int* at, const int* v, int* sums, int* low, int* high, unsigned* bits,
                                           unsigned long long* wide, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicAdd(sums + at[i], v[i]);
  atomicMin(low + at[i], v[i]);
  atomicMax(high + at[i], v[i]);
  atomicXor(bits + at[i], (unsigned)v[i]);
  atomicAdd(wide + at[i], (unsigned long long)(long long)v[i] * 1000000007ull);
}

extern "C" __global__ void shared_histogram(const unsigned char* x, unsigned* out, int n) {
  __shared__ unsigned bins[256];
  bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1u);
  __syncthreads();
  if (bins[threadIdx.x]) atomicAdd(out + threadIdx.x, bins[threadIdx.x]);
}

extern "C" __global__ void float_max_by_cas(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int* where = (int*)out;
  int old = *where;
  while (__int_as_float(old) < x[i]) {
    int seen = atomicCAS(where, old, __float_as_int(x[i]));
    if (seen == old) break;
    old = seen;
  }
}

extern "C" __global__ void wrap_counters(unsigned* counters, unsigned* old, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) old[i] = atomicInc(counters, 9u);
  if (i < n) atomicDec(counters + 1, 6u);
  if (i < n) atomicExch(counters + 2, 77u);
  if (i < n) atomicAnd(counters + 3, ~(1u << (i & 31)));
  if (i < n) atomicOr(counters + 4, 1u << (i & 7));
}

extern "C" __global__ void double_atomics(const double* x, double* out, __half2* halves, __nv_bfloat16* bf, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicAdd(out + (i & 3), x[i]);
  atomicAdd(halves + (i & 1), __floats2half2_rn(1.0f, 2.0f));
  atomicAdd(bf, __float2bfloat16(1.0f));
}

extern "C" __global__ void warp_votes(const int* x, unsigned* ballots, int* flags, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int v = i < n ? x[i] : 0;
  ballots[i] = __ballot_sync(0xffffffffu, v > 0);
  flags[i] = __any_sync(0xffffffffu, v > 90) | __all_sync(0xffffffffu, v > -95) << 1;
}

extern "C" __global__ void matches(const int* x, unsigned* any, unsigned* all, int* same) {
  int i = threadIdx.x;
  any[i] = __match_any_sync(0xffffffffu, x[i]);
  int pred;
  all[i] = __match_all_sync(0xffffffffu, x[i / 32 * 32 + (i < 32 ? 0 : i % 32)], &pred);
  same[i] = pred;
}

extern "C" __global__ void warp_reductions(const int* x, int* sum, int* low, unsigned* bits) {
  int i = threadIdx.x;
  sum[i] = __reduce_add_sync(0xffffffffu, x[i]);
  low[i] = __reduce_min_sync(0xffffffffu, x[i]);
  bits[i] = __reduce_or_sync(0xffffffffu, (unsigned)x[i]);
}

extern "C" __global__ void half_warps(const int* x, int* out, unsigned* masks) {
  int i = threadIdx.x, lane = i & 31;
  if (lane < 11) {
    int v = x[i];
    for (int d = 1; d < 11; d++) v += __shfl_sync(0x7ffu, x[i], (lane + d) % 11);
    out[i] = v;
  } else {
    out[i] = __reduce_max_sync(0xfffff800u, x[i]);
  }
  masks[i] = __ballot_sync(0xffffffffu, lane % 3 == 0);
}

extern "C" __global__ void early_exit(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned active = __activemask();
  float v = x[i];
  for (int d = 16; d; d >>= 1) {
    float other = __shfl_down_sync(active, v, d);
    if ((threadIdx.x & 31) + d < 32 && i + d < n) v += other;
  }
  if ((threadIdx.x & 31) == 0) out[i / 32] = v;
}

extern "C" __global__ void groups(const int* x, int* tiles, int* total) {
  __shared__ int sum;
  auto block = cg::this_thread_block();
  if (block.thread_rank() == 0) sum = 0;
  block.sync();
  auto tile = cg::tiled_partition<8>(block);
  int v = x[blockIdx.x * blockDim.x + threadIdx.x];
  for (int d = 4; d; d >>= 1) v += tile.shfl_xor(v, d);
  if (tile.thread_rank() == 0) {
    tiles[(blockIdx.x * blockDim.x + threadIdx.x) / 8] = v;
    atomicAdd(&sum, v);
  }
  block.sync();
  if (block.thread_rank() == 0) total[blockIdx.x] = sum;
}

extern "C" __global__ void dot_products(const int* a, const int* b, int* out, unsigned* u, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  out[i] = __dp4a(a[i], b[i], 5);
  u[i] = __dp4a((unsigned)a[i], (unsigned)b[i], 7u);
  out[n + i] = __dp2a_lo(a[i], b[i], 1);
  out[2 * n + i] = __dp2a_hi(a[i], b[i], 2);
}

extern "C" __global__ void bit_tricks(const unsigned* a, const unsigned* b, unsigned* out, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  unsigned x = a[i], y = b[i];
  unsigned r[16] = {__brev(x), (unsigned)__popc(x), (unsigned)__clz(x), (unsigned)__ffs(x), __byte_perm(x, y, 0x5140),
                    __funnelshift_l(x, y, y), __funnelshift_r(x, y, y), __umulhi(x, y), __usad(x, y, 3u),
                    __umul24(x, y), (unsigned)__mul24((int)x, (int)y), __uhadd(x, y), (unsigned)__sad((int)x, (int)y, 9u),
                    __vadd2(x, y), __vmaxu4(x, y), (unsigned)__fns(x, y & 31, 1)};
  for (int k = 0; k < 16; k++) out[k * n + i] = r[k];
}

extern "C" __global__ void local_array(const int* index, int* out, int n) {
  int i = threadIdx.x;
  int stack[24];
  for (int k = 0; k < 24; k++) stack[k] = k * k + i;
  int at = index[i] % 24;
  stack[at] = -1;
  int sum = 0;
  for (int k = 0; k <= index[i] % 20; k++) sum += stack[(at + k * 7) % 24];
  out[i] = sum;
}

__device__ __noinline__ float poly(const float* c, int n, float x) {
  float s = 0;
  for (int k = n - 1; k >= 0; k--) s = s * x + c[k];
  return s;
}
__device__ __noinline__ int collatz(int n) {
  int steps = 0;
  while (n != 1) n = n & 1 ? 3 * n + 1 : n / 2, steps++;
  return steps;
}
__constant__ float coefficients[5] = {1.0f, -0.5f, 0.25f, 2.0f, -1.0f};
__device__ int calls_made = 3;

extern "C" __global__ void function_calls(const float* x, float* out, int* steps, int* made, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  float local[5];
  for (int k = 0; k < 5; k++) local[k] = coefficients[k] * 2;
  out[i] = poly(local, 5, x[i]) + poly(coefficients, 3, x[i]);
  steps[i] = collatz(i + 1);
  atomicAdd(&calls_made, 1);
  __syncwarp(__activemask());
  if (x[i] > 1e30f) printf("huge %f\n", x[i]);
  assert(steps[i] >= 0);
  __threadfence_block();
  if (i == 0) made[0] = 1;
}

extern "C" __global__ void jump_table(const int* op, const int* a, const int* b, int* out, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  int x = a[i], y = b[i], r;
  switch (op[i]) {
    case 0: r = x + y; break;
    case 1: r = x - y; break;
    case 2: r = x * y; break;
    case 3: r = y ? x / y : 0; break;
    case 4: r = x ^ y; break;
    case 5: r = x << (y & 7); break;
    case 6: r = x % (y | 1); break;
    case 7: r = -x; break;
    default: r = 12345;
  }
  out[i] = r;
}

extern "C" __global__ void double_math(const double* x, const double* y, double* out, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  double a = x[i], b = y[i];
  double r[10] = {a * b + 1.0, fma(a, b, -a * b), a / b, sqrt(a), exp(-b), log(a), sin(a), pow(a, b), rsqrt(a), atan2(a, b)};
  for (int k = 0; k < 10; k++) out[k * n + i] = r[k];
}

extern "C" __global__ void rounding_modes(const float* x, const float* y, float* out, double* dout, int* iout, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  float a = x[i], b = y[i];
  float r[16] = {__fadd_rz(a, b), __fadd_ru(a, b), __fadd_rd(a, b), __fmul_rz(a, b), __fmul_ru(a, b), __fmul_rd(a, b),
                 __fdiv_rz(a, b), __fdiv_ru(a, b), __fdiv_rd(a, b), __fsqrt_rz(a), __fsqrt_ru(a), __fsqrt_rd(a),
                 __fmaf_rz(a, b, a), __fmaf_ru(a, b, a), __fmaf_rd(a, b, a), __frcp_rd(a)};
  for (int k = 0; k < 16; k++) out[k * n + i] = r[k];
  double p = a, q = b;
  double d[8] = {__dadd_rz(p, q), __dmul_ru(p, q), __ddiv_rd(p, q), __dsqrt_ru(p), __fma_rz(p, q, p), __fma_rn(p, q, -p),
                 __dadd_ru(p, q * 1e-9), __drcp_rn(q)};
  for (int k = 0; k < 8; k++) dout[k * n + i] = d[k];
  iout[i] = __float2int_rd(a * 100) + __float2int_ru(b * 100) * 7 + __float2int_rn(a) * 3;
  iout[n + i] = __float_as_int(__int2float_rz(0x7fffff81 - i)) ^ __float_as_int(__int2float_ru(0x7fffff81 - i));
  iout[2 * n + i] = __float_as_int(__double2float_ru(p * q));
}

extern "C" __global__ void half_math(const __half2* a, const __half2* b, __half2* out, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  __half2 x = a[i], y = b[i];
  __half2 r[12] = {__hadd2(x, y), __hmul2(x, y), __hfma2(x, y, x), __hsub2(x, y), __hmax2(x, y), __hmin2_nan(x, y),
                   __habs2(x), __hneg2(y), __hfma2_relu(x, y, y), __hadd2_sat(x, y), __hgt2(x, y), __h2div(x, y)};
  for (int k = 0; k < 12; k++) out[k * n + i] = r[k];
}

extern "C" __global__ void bfloat_math(const __nv_bfloat162* a, const __nv_bfloat162* b, __nv_bfloat162* out, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  __nv_bfloat162 x = a[i], y = b[i];
  __nv_bfloat162 r[6] = {__hadd2(x, y), __hmul2(x, y), __hfma2(x, y, x), __hmax2(x, y), __hneg2(x), __hfma2_relu(x, y, y)};
  for (int k = 0; k < 6; k++) out[k * n + i] = r[k];
}

extern "C" __global__ void wmma_half(const __half* a, const __half* b, float* c) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, __half, row_major> fa;
  fragment<matrix_b, 16, 16, 16, __half, col_major> fb;
  fragment<accumulator, 16, 16, 16, float> fc;
  fill_fragment(fc, 1.0f);
  for (int k = 0; k < 32; k += 16) {
    load_matrix_sync(fa, a + k, 32);
    load_matrix_sync(fb, b + k, 32);
    mma_sync(fc, fa, fb, fc);
  }
  for (int k = 0; k < fc.num_elements; k++) fc.x[k] *= 2.0f;
  store_matrix_sync(c, fc, 16, mem_row_major);
}

__device__ void wide_add(unsigned* r, const unsigned* a, const unsigned* b) {
  asm("add.cc.u32 %0, %4, %8;\n\taddc.cc.u32 %1, %5, %9;\n\taddc.cc.u32 %2, %6, %10;\n\taddc.u32 %3, %7, %11;"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));
}
extern "C" __global__ void inline_asm(const unsigned* a, const unsigned* b, unsigned* out, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  wide_add(out + 4 * i, a + 4 * i, b + 4 * i);
  unsigned lo, hi;
  asm("{\n\t.reg .u64 t;\n\tmul.wide.u32 t, %2, %3;\n\tmov.b64 {%0, %1}, t;\n\t}" : "=r"(lo), "=r"(hi) : "r"(a[4 * i]), "r"(b[4 * i]));
  unsigned lane, below;
  asm volatile("mov.u32 %0, %%laneid;\n\tmov.u32 %1, %%lanemask_lt;" : "=r"(lane), "=r"(below));
  out[4 * n + i] = lo ^ hi;
  out[5 * n + i] = lane * 31 + __popc(below);
  unsigned r;
  asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(r) : "r"(a[4 * i]), "r"(b[4 * i]), "r"(lane));
  out[6 * n + i] = r;
  asm("prmt.b32.rc16 %0, %1, %2, %3;" : "=r"(r) : "r"(a[4 * i]), "r"(b[4 * i]), "r"(1));
  out[7 * n + i] = r;
}

extern "C" __global__ void transpose_tiles(const float* x, float* out, int w, int h) {
  __shared__ float tile[32][33];
  int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
  for (int k = 0; k < 32; k += 8)
    if (c < w && r + k < h) tile[threadIdx.y + k][threadIdx.x] = x[(r + k) * w + c];
  __syncthreads();
  c = blockIdx.y * 32 + threadIdx.x, r = blockIdx.x * 32 + threadIdx.y;
  for (int k = 0; k < 32; k += 8)
    if (c < h && r + k < w) out[(r + k) * h + c] = tile[threadIdx.x][threadIdx.y + k];
}

extern "C" __global__ void block_counts(const int* x, int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int positive = __syncthreads_count(x[i] > 0);
  int any = __syncthreads_or(x[i] > 95), all = __syncthreads_and(x[i] > -100);
  if (threadIdx.x == 0) out[blockIdx.x] = positive + 1000 * (any != 0) + 2000 * (all != 0);
}

extern "C" __global__ void last_block(const float* x, float* partial, unsigned* done, float* out, int n) {
  __shared__ float s[128];
  __shared__ bool last;
  float v = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i];
  s[threadIdx.x] = v;
  __syncthreads();
  for (int d = 64; d; d >>= 1) {
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = s[0];
    __threadfence();
    last = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float total = 0;
    for (int b = 0; b < gridDim.x; b++) total += ((volatile float*)partial)[b];
    *out = total;
  }
}

extern "C" __global__ void timed_sleep(long long* out) {
  long long a = clock64();
  __nanosleep(100);
  long long b = clock64();
  out[threadIdx.x] = b >= a;
}

extern "C" __global__ void generic_pointers(const int* x, int* out, int n) {
  __shared__ int s[64];
  int i = threadIdx.x;
  s[i] = x[i] * 3;
  __syncthreads();
  const int* p = i & 32 ? (const int*)s : x;
  out[i] = p[i ^ 1] + (__isShared(p) ? 1000 : 0) + (__isGlobal(p) ? 2000 : 0);
}

extern "C" __global__ void bytes_and_shorts(const signed char* c, const short* s, short* out, unsigned char* u, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = (short)(c[i] * s[i] - (c[i] >> 2));
  u[i] = (unsigned char)(c[i] > 0 ? c[i] * 2 : -c[i]);
}

struct Particle { float3 p; int id; double w; };
extern "C" __global__ void structures(const Particle* in, Particle* out, Particle offset, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  Particle q = in[i];
  q.p.x += offset.p.x; q.p.y *= offset.p.y; q.p.z -= offset.p.z;
  q.id ^= offset.id; q.w += offset.w;
  out[n - 1 - i] = q;
}

extern "C" __global__ void pipelined_sum(const float4* x, float* out, int tiles) {
  __shared__ float4 stage[2][64];
  float sum = 0;
  __pipeline_memcpy_async(&stage[0][threadIdx.x], x + threadIdx.x, 16);
  __pipeline_commit();
  for (int t = 0; t < tiles; t++) {
    if (t + 1 < tiles) __pipeline_memcpy_async(&stage[(t + 1) & 1][threadIdx.x], x + (t + 1) * 64 + threadIdx.x, 16);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    float4 v = stage[t & 1][threadIdx.x ^ 1];
    sum += v.x + 2 * v.y + 3 * v.z + 4 * v.w;
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}

extern "C" __global__ void barrier_exchange(const int* x, int* out, int rounds) {
  __shared__ cuda::barrier<cuda::thread_scope_block> ready;
  __shared__ int s[128];
  if (threadIdx.x == 0) init(&ready, blockDim.x);
  __syncthreads();
  int v = x[threadIdx.x];
  for (int r = 0; r < rounds; r++) {
    s[threadIdx.x] = v;
    auto token = ready.arrive();
    ready.wait(std::move(token));
    v += s[(threadIdx.x + 33) & 127];
    ready.arrive_and_wait();
  }
  out[threadIdx.x] = v;
}

extern "C" __global__ void grid_barrier(int* data, unsigned* arrived, int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  data[i] = i * 3;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (((volatile unsigned*)arrived)[0] < gridDim.x) __nanosleep(20);
    __threadfence();
  }
  __syncthreads();
  out[i] = ((volatile int*)data)[(i + blockDim.x) % n];
}

extern "C" __global__ void spin_lock(int* lock, int* total, const int* x) {
  int v = x[blockIdx.x * blockDim.x + threadIdx.x];
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
  if ((threadIdx.x & 31) == 0) {
    while (atomicCAS(lock, 0, 1) != 0) __nanosleep(10);
    __threadfence();
    ((volatile int*)total)[0] = ((volatile int*)total)[0] + v;
    __threadfence();
    atomicExch(lock, 0);
  }
}
