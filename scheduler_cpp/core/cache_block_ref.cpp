#include "core/cache_block_ref.h"

#include "core/block_pool.h"

namespace tokenspeed {

void CacheBlockRef::reset() noexcept {
  CacheBlock* block = std::exchange(block_, nullptr);
  if (block == nullptr) return;
  ++block->pool_->dropped_handles_;
  if (--block->owners_ == 0) block->pool_->Release(*block);
}

}  // namespace tokenspeed
