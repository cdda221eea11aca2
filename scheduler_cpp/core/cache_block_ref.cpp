#include "core/cache_block_ref.h"

#include "core/block_pool.h"

namespace tokenspeed {

void CacheBlockRef::reset() noexcept {
  CacheBlock* block = std::exchange(block_, nullptr);
  if (block != nullptr && --block->owners_ == 0) block->pool_->Release(*block);
}

}  // namespace tokenspeed
